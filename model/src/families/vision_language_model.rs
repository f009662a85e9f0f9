//! Model of a family with pictures: a vision tower followed by a decoder. Each
//! family defines its tower.

use bursar_kernels::{Backend, KernelError, Scope, Tensor};

use super::row::{Settings, Weights};
use crate::{
    Depth,
    blocks::{
        decoder::Decoder,
        vision::{PackedImages, exchange_rows},
    },
    flow::ResizedImage,
    weights::{WeightError, WeightMap},
};

/// Vision tower of the family with the configuration `C`.
pub trait Tower<C>: Sized {
    /// Pictures packed for one launch.
    type Batch: AsRef<PackedImages> + Clone + std::fmt::Debug + PartialEq;

    /// Claims the weights of the tower and then of the decoder, each under the names
    /// that the checkpoint uses.
    fn claim_model(config: C, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError>;

    /// Packs pictures, each with the rows of the vision cache for its embeddings. No pixel is
    /// copied.
    ///
    /// # Panics
    /// See [`PackedImages::push`].
    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> Self::Batch;

    /// Runs the layers of the tower that `depth` selects over `batch`, and writes one row per
    /// embedding to `cache` `[rows, width]`. [`EmbeddingLayout`] describes the columns of a row.
    ///
    /// [`EmbeddingLayout`]: crate::blocks::vision::EmbeddingLayout
    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &Self::Batch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError>;
}

/// Pictures packed for one launch, with one entry per rank. A single entry means that every rank
/// encodes all pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodeBatch<B> {
    of_ranks: Vec<B>,
}

impl<B: AsRef<PackedImages>> EncodeBatch<B> {
    fn packed(&self) -> impl Iterator<Item = &PackedImages> {
        self.of_ranks.iter().map(AsRef::as_ref)
    }
}

/// Weights of a family with pictures.
pub struct VisionLanguageModel<T> {
    /// Encodes pictures to rows of the vision cache.
    tower: T,
    /// Computes logits from rows of the vision cache and text tokens.
    decoder: Decoder,
}

impl<C: Settings, T: Tower<C>> Weights<C> for VisionLanguageModel<T> {
    type Batch = EncodeBatch<T::Batch>;

    fn claim(config: C, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let (tower, decoder) = T::claim_model(config, map)?;
        Ok(VisionLanguageModel { tower, decoder })
    }

    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn pack(&self, of_ranks: &[Vec<(&ResizedImage, &[u32])>]) -> EncodeBatch<T::Batch> {
        EncodeBatch { of_ranks: of_ranks.iter().map(|pictures| self.tower.pack(pictures)).collect() }
    }

    fn patches(launch: &EncodeBatch<T::Batch>) -> usize {
        launch.packed().map(PackedImages::patches).sum()
    }

    fn embeddings(launch: &EncodeBatch<T::Batch>) -> usize {
        launch.packed().map(PackedImages::embeddings).sum()
    }

    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        launch: &EncodeBatch<T::Batch>,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        if let [all] = &launch.of_ranks[..] {
            return self.tower.encode(scope, all, cache, depth);
        }
        assert_eq!(launch.of_ranks.len(), scope.rank().of(), "a launch is packed for these ranks");
        let own = &launch.of_ranks[scope.rank().index()];
        if own.as_ref().pictures() > 0 {
            self.tower.encode(scope, own, cache, depth)?;
        }
        exchange_rows(scope, &launch.packed().map(PackedImages::rows).collect::<Vec<_>>(), cache)
    }
}
