"""AdamW on state that stays in host memory: the kernel itself reads and writes it, so nothing is staged or copied.

kernel.py: the arithmetic, bit for bit torch's. engine.py: what runs when. support.py: can it be used here, and is it
exact here. rates.py: `python -m offbench.offload.zerocopy`, how fast it is.
"""
