"""Environments of other packages behind Gymnasium's interface, where the packages' own cannot be used as they are."""
