"""Whole training scripts as different people would write them.

right_*.py are correct, however much their ranks differ on purpose. wrong_*.py have one fault each,
and with `--fixed` the lines that repair it. Each has `main(argv)`, which initialises gloo unless
somebody has done so, and returns the trained model and the metrics that the script reports.

A wrong one says what is wrong with it, as it follows from how it is written:

CAUSE     the name of the cause.
EXPECTED  where it becomes visible:
    step       updates from 0, over the whole script.
    phase      start, gradients, parameters (after the update) or evaluation (`step` updates made).
    tensor     names of the tensors that may come first; any of them is right.
    odd_ranks  the ranks outside of the majority, of three and more; () where all differ.
    stuck      of a hang: the update that nobody can finish.
    None where there is no such thing: replicas that agree and are all wrong have no tensor.
HANGS     True where the fault ends in a hang or an error; it needs a process group of its own.
"""
