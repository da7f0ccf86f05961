"""Where saved bytes live: allocators and the tiers built on them."""
