"""Training scripts as users write them, correct and faulty; each is run under the watcher."""
