"""The replay audit: is the synchronised gradient the one that a single process would have had.

At an audited update every rank writes the inputs that it really used, the state of its random
numbers, and what arrived at the outputs of the model in its own backward pass. The last rank to
write runs all of it again, alone, from the parameters of that moment, and compares. How much each
row of a loss weighed is read from the graph of the loss itself.
"""
