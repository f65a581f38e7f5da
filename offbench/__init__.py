"""What keeping optimizer state in host memory costs, why, and how to make it cost nothing."""

__version__ = "0.1.0"
