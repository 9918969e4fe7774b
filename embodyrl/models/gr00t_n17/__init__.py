"""GR00T N1.7 and N1.6: vision-language-action models whose diffusion transformer attends to text and images in turn."""
