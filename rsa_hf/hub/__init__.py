"""Share a patched model on the Hub: write its model card and upload its folder."""
