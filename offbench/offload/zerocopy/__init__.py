"""AdamW on state that stays in host memory: the kernel itself reads and writes it, so nothing is staged or copied.

kernel.py: the arithmetic, bit for bit torch's. engine.py: what runs when. support.py: can it be used here, and is it
exact here. rates.py: `python -m offbench.offload.zerocopy`, how fast it is.
"""

PROGRAMS = 8
"""Of the kernel. On an H200 whose copies reach 94 GiB/s both ways 8, 16 and 32 of them moved 77, and 4 moved 57
(`python -m offbench.offload.zerocopy`, 2026-11-29): more would take multiprocessors from the model and gain nothing.
Here because the planner needs it and loads neither torch nor Triton."""
