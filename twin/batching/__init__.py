"""What ordinary engines that batch requests take for a step, and what a GPU costs."""
