"""A grid gateway: a small site's servers as machines of one computer, on a network of their own."""
