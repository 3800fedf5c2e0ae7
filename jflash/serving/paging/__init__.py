"""Where requests' keys, values and states lie: pages, windows, copies, and the room for them."""
