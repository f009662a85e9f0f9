//! Samples of one prompt. The first computes it. The others wait, then take its blocks and pictures.

use tokio::sync::watch;

use super::request_pictures::RequestPictures;

/// What the first sample leaves to the others.
#[derive(Clone)]
pub(super) enum Lead {
    /// The prompt is computed.
    Computed {
        /// The generation of the actors that computed it.
        generation: u64,
        /// The prompt's pictures.
        pictures: RequestPictures,
    },
    /// Actors died under the first sample too often. The others would fare no better.
    GivenUp,
}

/// The role of a sample among those of its prompt.
pub(super) enum LeaderRole {
    /// A single sample, or one that no longer waits or is waited for.
    Alone,
    /// Computes the prompt while others wait.
    Leads(watch::Sender<Option<Lead>>),
    /// Waits for the first sample.
    Follows(watch::Receiver<Option<Lead>>),
}

impl LeaderRole {
    /// The roles of `samples` samples.
    pub(super) fn of(samples: usize) -> Vec<LeaderRole> {
        if samples < 2 {
            return (0..samples).map(|_| LeaderRole::Alone).collect();
        }
        let (leads, follows) = watch::channel(None);
        let followers = (1..samples).map(|_| LeaderRole::Follows(follows.clone()));
        std::iter::once(LeaderRole::Leads(leads)).chain(followers).collect()
    }

    /// Whether others wait for the prompt.
    pub(super) fn leads(&self) -> bool {
        matches!(self, LeaderRole::Leads(_))
    }

    /// Lets the waiting samples go on: the prompt is computed, or given up.
    pub(super) fn announce(&mut self, lead: impl FnOnce() -> Lead) {
        if let LeaderRole::Leads(followers) = std::mem::replace(self, LeaderRole::Alone) {
            followers.send_replace(Some(lead()));
        }
    }

    /// Waits until the prompt is computed, or the first sample has gone.
    pub(super) async fn wait(&mut self) -> Option<Lead> {
        let LeaderRole::Follows(leader) = self else { return None };
        let lead = leader.wait_for(Option::is_some).await.ok().and_then(|lead| lead.clone());
        // This drops the receiver. The shared pictures are held until every sample has done so.
        *self = LeaderRole::Alone;
        lead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn followers_wait_for_the_first_sample_unless_it_is_gone() {
        let mut parts = LeaderRole::of(3);
        let mut second = parts.pop().expect("three");
        let mut third = parts.pop().expect("three");
        let mut first = parts.pop().expect("three");
        first.announce(|| Lead::Computed { generation: 7, pictures: RequestPictures::default() });
        first.announce(|| unreachable!("said once"));
        assert!(matches!(second.wait().await, Some(Lead::Computed { generation: 7, .. })));
        assert!(matches!(third.wait().await, Some(Lead::Computed { generation: 7, .. })));
        assert!(second.wait().await.is_none(), "nobody waits twice");

        let mut parts = LeaderRole::of(2);
        let mut second = parts.pop().expect("two");
        drop(parts);
        assert!(second.wait().await.is_none(), "the first has gone without a word");
        assert!(LeaderRole::of(1).pop().expect("one").wait().await.is_none());
    }
}
