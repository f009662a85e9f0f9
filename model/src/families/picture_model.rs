//! The model of a family with pictures: its vision tower before a decoder. A family says what its tower is.

use bursar_kernels::{Backend, KernelError, Scope, Tensor};

use super::row::{Settings, Weights};
use crate::{
    Depth,
    blocks::{decoder::Decoder, vision::PackedPictures},
    flow::ResizedImage,
    weights::{WeightError, WeightMap},
};

/// A family's vision tower.
pub trait Tower: Sized {
    /// The family's configuration.
    type Config: Settings;

    /// Pictures packed for one launch.
    type Batch: AsRef<PackedPictures> + Clone + std::fmt::Debug + PartialEq;

    /// Claims the tower's weights and then the decoder's, each under the names of the checkpoint.
    fn claim_model(config: Self::Config, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError>;

    /// Packs pictures, each with the rows of the vision cache for its embeddings. No pixel is copied.
    ///
    /// # Panics
    /// As [`PackedPictures::push`].
    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> Self::Batch;

    /// Runs the tower over `batch`, through the layers of `depth`, and writes the [`PictureRow`]s to their rows of
    /// `cache` `[rows, width]`.
    ///
    /// [`PictureRow`]: crate::blocks::vision::PictureRow
    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &Self::Batch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError>;
}

/// The weights of a family with pictures.
pub struct PictureModel<T> {
    /// Turns pictures into rows of the vision cache.
    tower: T,
    /// Turns these and text into logits.
    decoder: Decoder,
}

impl<T: Tower> Weights<T::Config> for PictureModel<T> {
    type Batch = T::Batch;

    fn claim(config: T::Config, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let (tower, decoder) = T::claim_model(config, map)?;
        Ok(PictureModel { tower, decoder })
    }

    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> T::Batch {
        self.tower.pack(pictures)
    }

    fn patches(batch: &T::Batch) -> usize {
        batch.as_ref().patches()
    }

    fn embeddings(batch: &T::Batch) -> usize {
        batch.as_ref().embeddings()
    }

    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &T::Batch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        self.tower.encode(scope, batch, cache, depth)
    }
}
