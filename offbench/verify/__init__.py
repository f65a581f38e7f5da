"""The bitwise proof: every exact arm against torch.optim.AdamW, over the kinds of job it will meet, on this host.

cases.py: what is tried, as data. trial.py: one training run, and where two of them differ. trainees.py: the models.
ranks.py: process groups, one launch per world size. table.py: what is printed. command.py: `offbench verify`.
"""
