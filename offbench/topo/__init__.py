"""`offbench topo`: the machine as text, its floor, and what was measured on it before."""
