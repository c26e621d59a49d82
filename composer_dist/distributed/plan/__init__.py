"""The plan: the features' plans put together."""
