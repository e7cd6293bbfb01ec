"""What detection and segmentation share."""
