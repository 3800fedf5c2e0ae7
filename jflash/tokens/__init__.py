"""From logits to tokens, and from a drafter's scores to drafts."""
