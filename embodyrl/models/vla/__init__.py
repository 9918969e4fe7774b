"""Code that vision-language-action models of several families share."""
