"""The proof that a plan is safe to run and computes its model."""
