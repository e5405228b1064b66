"""The zoo: models and loops as users have them, under every exchange and entrance."""
