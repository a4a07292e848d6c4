"""Images: folders, shards, arrays, tensors, datasets, iterables -> samples in the model's range."""

from trueup.images.batch import Batch, sent
from trueup.images.choosing import Ranks
from trueup.images.images import Images, as_images
from trueup.images.samples import Samples, open_images

__all__ = ["Batch", "Images", "Ranks", "Samples", "as_images", "open_images", "sent"]
