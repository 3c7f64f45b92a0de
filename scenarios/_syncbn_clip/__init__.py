"""What syncbn_clip is made of: claims, judges of clipping and of freezing, and the watched norm."""
