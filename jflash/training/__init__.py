"""Training a drafter: prompts, the target's answers, the losses, the trainer."""
