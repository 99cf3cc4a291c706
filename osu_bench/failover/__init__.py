"""What a cut costs: operations in a loop on a cluster whose links are cut and healed meanwhile."""
