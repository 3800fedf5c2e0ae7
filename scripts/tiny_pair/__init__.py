"""How the embedded pair is made and judged: generator, recipe, stages, evaluation."""
