"""What logsoftmax_drift is made of: its judges, and the probes that need one process only."""
