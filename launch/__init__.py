"""From a command line to running ranks: compose once, plan, start, watch, judge."""
