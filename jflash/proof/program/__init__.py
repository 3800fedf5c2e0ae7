"""What the compiler made of a step, and the gates that it must pass."""
