"""From logits to tokens: changes, filters, draws, acceptance, logprobs; from scores to drafts."""
