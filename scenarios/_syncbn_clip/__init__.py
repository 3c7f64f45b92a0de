"""What syncbn_clip is made of: its claims, their judges for clips and for freezing, the watched norm."""
