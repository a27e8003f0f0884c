"""What the mesh looks like: node cards, directed links, the immutable graph made of them."""
