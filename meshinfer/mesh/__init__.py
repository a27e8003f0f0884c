"""Who is here and how far away: membership, the view, gossip, discovery, link probes."""
