"""A residual network of 25.6 million parameters: the layers of ResNet-50 in plain torch."""

from __future__ import annotations

import torch
from torch import nn

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks, stride of each stage."""
_WIDER = 4


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _WIDER
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1, 1),
        )
        same = inputs == outputs and stride == 1
        self.skip = (
            nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def residual_network() -> nn.Sequential:
    """Return the network, for images of 3 channels and 1000 classes."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in _STAGES:
        for block in range(blocks):
            layers.append(_Block(inputs, width, stride if block == 0 else 1))
            inputs = width * _WIDER
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
