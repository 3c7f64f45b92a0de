"""REINFORCE: each rank plays episodes of its own, of whatever length they turn out to have."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Walk:
    """Stay near 0 as long as possible; an episode ends at a distance of 2."""

    def __init__(self, generator):
        self.generator = generator

    def reset(self):
        self.state = torch.randn(2, generator=self.generator) * 0.3
        return self.state

    def step(self, action):
        push = torch.randn(2, generator=self.generator) * 0.4
        self.state = self.state + push + torch.tensor([0.3, -0.3]) * (2 * action - 1)
        return self.state, 1.0, bool(self.state.abs().max() > 2)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, states):
        hidden = self.body(states)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


@torch.no_grad()
def play(policy, env, limit=20):
    state, states, actions, rewards = env.reset(), [], [], []
    for _ in range(limit):
        probabilities = policy(state)[0].softmax(-1)
        action = int(torch.multinomial(probabilities, 1, generator=env.generator))
        states.append(state)
        actions.append(action)
        state, reward, done = env.step(action)
        rewards.append(reward)
        if done:
            break
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(states), torch.tensor(actions), returns


def learn(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    agent = DDP(ActorCritic())
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3)
    env = Walk(torch.Generator().manual_seed(1000 + args.seed * world + rank))
    for _ in range(args.updates):
        # Acting needs no gradients, so the wrapper takes no part in it.
        episodes = [play(agent.module, env) for _ in range(args.episodes)]
        states, actions, returns = map(torch.cat, zip(*episodes, strict=True))
        logits, values = agent(states)
        chosen = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
        advantage = returns - values
        # Episodes count alike on all ranks, however long they are.
        loss = (-chosen * advantage.detach() + 0.5 * advantage.square()).sum() / args.episodes
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 5.0)
        optimizer.step()
    length = torch.tensor(float(len(returns)))
    dist.all_reduce(length)
    return agent, {}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if dist.is_initialized():
        return learn(args)
    dist.init_process_group("gloo")
    result = learn(args)
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
