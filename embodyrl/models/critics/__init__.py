"""Critics of actions, for the methods that learn them and the policies that choose by them."""
