"""The target in a process of its own on the trainer's GPU, its supervision handed over without a copy.

Why a process, and not SGLang inside each rank as with one GPU: SGLang's parallel state is global and wants a default
process group of exactly ``tp * pp`` ranks, while the default group of a data-parallel trainer has all of them. In a
process of its own nothing need be patched: its default group is the target's. It can also run from another Python
environment, and crash without taking the trainer along. (The other way, in process, is in the guide.)

``client`` is the trainer's side, ``worker`` the process; ``wire`` is what they say to each other, ``arena`` the memory
that both see. The two are parent and child on one host: a socket pair, no port and no file, which the end of either
closes.
"""
