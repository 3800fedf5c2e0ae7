"""Target families and the drafter, one file each: pure Flax modules, caches go in and out."""
