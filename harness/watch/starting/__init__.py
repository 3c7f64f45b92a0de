"""How a program comes to be watched: started by us, by torchrun, by mp.spawn, or attached."""
