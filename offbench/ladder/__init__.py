"""`offbench topo --measure`: every GPU copies alone and together, both ways; what that says about the links."""
