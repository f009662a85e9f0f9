//! Pure: the user's choice of the KV cache size, and the sizing that follows from it.

use bursar_budgets::Bytes;
use bursar_kernels::{BLOCK_TOKENS, KvShape};

use super::{KvShare, Sizing};
use crate::compute::memory::KvMemory;

/// The user's choice of the KV cache size. A size takes precedence over a share, `kv_tokens` over
/// `kv_bytes`, and `device_fraction` over `memory_fraction`. If nothing is set, the default depends
/// on the kind of device ([`KvShare::expected_of`]).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KvChoice {
    /// A share of the remaining memory, above 0 and up to 1.
    pub memory_fraction: Option<f64>,
    /// A share of the whole device for all memory of this process, above 0 and up to 1.
    pub device_fraction: Option<f64>,
    /// A size in tokens.
    pub kv_tokens: Option<usize>,
    /// A size in bytes, rounded down to whole pages for each layer.
    pub kv_bytes: Option<Bytes>,
}

/// The memory available when the KV cache is sized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCapacity {
    pub total: Bytes,
    /// Bytes of this process outside this model's KV cache: overhead and all other leases.
    pub outside_pool: Bytes,
    /// Bytes that the ledger could grant now.
    pub available: Bytes,
    /// Bytes that the KV cache holds already.
    pub probe: Bytes,
    /// Whether the device is host memory in place of a GPU.
    pub is_host: bool,
}

impl KvChoice {
    /// Returns the size that the user fixed, in tokens. A size in bytes is converted.
    pub fn pinned_tokens(&self, shape: KvShape, page: Bytes) -> Option<usize> {
        let of_bytes = |bytes| KvMemory::blocks_in(shape, bytes, page) * BLOCK_TOKENS;
        self.kv_tokens.or_else(|| self.kv_bytes.map(of_bytes))
    }

    /// Returns the KV cache's share of the remaining memory. The share applies only if no size is
    /// fixed.
    pub fn share(&self, capacity: &KvCapacity) -> KvShare {
        match (self.device_fraction, self.memory_fraction) {
            (Some(fraction), _) => KvShare::of_whole(fraction, capacity.total, capacity.outside_pool),
            (None, Some(fraction)) => KvShare::Fraction(fraction),
            (None, None) => KvShare::expected_of(capacity.is_host, capacity.total),
        }
    }

    pub fn is_pinned(&self) -> bool {
        self.kv_tokens.is_some() || self.kv_bytes.is_some()
    }

    pub fn sizing(&self, capacity: &KvCapacity, shape: KvShape, page: Bytes) -> Sizing {
        Sizing {
            available: capacity.available,
            probe: capacity.probe,
            share: self.share(capacity),
            pinned_tokens: self.pinned_tokens(shape, page),
        }
    }
}

#[cfg(test)]
mod tests {
    use bursar_kernels::DType;

    use super::*;

    const SHAPE: KvShape = KvShape { layers: 4, kv_heads: 2, head_dim: 32, dtype: DType::F32 };
    const PAGE: Bytes = Bytes(64 << 10);

    /// A device of 100 MiB: 10 MiB are the probe, 30 MiB are other memory of this process, 10 MiB
    /// belong to another process, and 50 MiB are available.
    fn capacity() -> KvCapacity {
        KvCapacity {
            total: Bytes::mib(100),
            outside_pool: Bytes::mib(30),
            available: Bytes::mib(50),
            probe: Bytes::mib(10),
            is_host: true,
        }
    }

    fn bytes(choice: KvChoice) -> Bytes {
        let blocks = choice.sizing(&capacity(), SHAPE, PAGE).blocks(SHAPE, PAGE);
        KvMemory::bytes(SHAPE, blocks, PAGE)
    }

    #[test]
    fn a_share_of_the_whole_device_counts_all_our_bytes() {
        let of_whole = |fraction| bytes(KvChoice { device_fraction: Some(fraction), ..KvChoice::default() });
        assert_eq!(of_whole(0.5), Bytes::mib(20), "half of 100, minus the 30 that Bursar holds");
        assert_eq!(of_whole(0.3), Bytes::ZERO, "the memory Bursar holds fills the share");
        assert_eq!(of_whole(0.2), Bytes::ZERO, "the memory Bursar holds exceeds the share");
        assert_eq!(of_whole(1.0), Bytes::mib(60), "the share is limited to available memory; another process holds 10");
    }

    #[test]
    fn a_share_of_available_memory_ignores_bytes_that_bursar_holds() {
        assert_eq!(
            bytes(KvChoice { memory_fraction: Some(0.5), ..KvChoice::default() }),
            Bytes::mib(30),
            "half of the available memory"
        );
        assert_eq!(bytes(KvChoice::default()), Bytes::mib(54), "nine tenths of the memory of a host");
    }

    #[test]
    fn an_explicit_size_overrides_a_share_and_uses_whole_pages() {
        let shared = KvChoice { memory_fraction: Some(0.5), ..KvChoice::default() };
        assert_eq!(bytes(KvChoice { kv_bytes: Some(Bytes::mib(8) + Bytes(70_000)), ..shared }), Bytes::mib(8));
        let tokens = KvChoice { kv_tokens: Some(1000), ..shared };
        assert_eq!(tokens.sizing(&capacity(), SHAPE, PAGE).blocks(SHAPE, PAGE), 63);
    }

    #[test]
    fn a_size_is_pinned_and_a_share_is_not() {
        let (tokens, size, share) = (Some(1000), Some(Bytes::mib(8)), Some(0.5));
        let none = KvChoice::default();
        assert!(KvChoice { kv_tokens: tokens, ..none }.is_pinned() && KvChoice { kv_bytes: size, ..none }.is_pinned());
        let shares = KvChoice { memory_fraction: share, device_fraction: share, ..none };
        assert!(!shares.is_pinned() && !none.is_pinned());
    }
}
