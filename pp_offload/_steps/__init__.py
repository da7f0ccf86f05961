"""From one reset to the next: what comes next, and what a step teaches the ones to come."""
