"""What a process says about its work to those who operate it: traces and metrics."""
