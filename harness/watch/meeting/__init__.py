"""Where the ranks of a run meet: files of one host, a store between hosts, and what is written."""
