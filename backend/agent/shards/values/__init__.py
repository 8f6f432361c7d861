"""What the numbers in a file are: a peek at a tensor's ends, and its statistics over a sample or all of it.

Offsets come from a report; numpy counts where this Python has it, and the standard library where it has not.
"""
