"""Critics of actions: networks that value a chunk, for the methods that learn them and the policies that choose by them."""
