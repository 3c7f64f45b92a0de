"""What clip_allreduce is made of: the claims and their judges, by theme, and its arms' parts."""
