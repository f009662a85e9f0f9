//! Connection limits: in total, per address, and a reserve for health and metrics requests when
//! a limit is reached.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use super::options::ServeOptions;
use bursar_actors::metric::HTTP_CONNECTIONS;

/// Number of connections beyond the limits. On these connections, all requests except health and
/// metrics requests get 503.
const RESERVE: usize = 64;
/// Connections of one address in the reserve. A client that reaches its own limit must
/// not fill the reserve.
const RESERVE_PER_ADDRESS: usize = 8;

/// Which requests are answered on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// All requests are answered.
    Usual,
    /// Only health and metrics requests are answered.
    Reserve,
}

/// Numbers of open connections, with their limits.
pub(super) struct ConnectionSlots {
    taken: Arc<Mutex<Taken>>,
    limit: usize,
    per_address: usize,
}

#[derive(Default)]
struct Taken {
    usual: usize,
    reserve: usize,
    /// Usual and reserve connections of each address that has any.
    addresses: HashMap<IpAddr, (usize, usize)>,
}

/// The slot of one connection. Dropping it frees the slot.
pub(super) struct ConnectionSlot {
    pub(super) kind: Kind,
    address: IpAddr,
    taken: Arc<Mutex<Taken>>,
}

impl ConnectionSlots {
    pub(super) fn new(options: &ServeOptions) -> Self {
        let (limit, per_address) = (options.connections.max(1), options.connections_per_address.max(1));
        ConnectionSlots { taken: Arc::default(), limit, per_address }
    }

    /// Takes a slot for a connection from `address`. The slot is in the reserve if `kind` is
    /// [`Kind::Reserve`] or a usual limit is reached. Returns `None` if the reserve is full too, or
    /// if the address already has its maximum there.
    pub(super) fn take(&self, address: IpAddr, kind: Kind) -> Option<ConnectionSlot> {
        let address = counted_by(address);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (usual, reserve) = taken.addresses.get(&address).copied().unwrap_or_default();
        let kind = match kind {
            Kind::Usual if taken.usual < self.limit && usual < self.per_address => Kind::Usual,
            _ if taken.reserve < RESERVE && reserve < RESERVE_PER_ADDRESS => Kind::Reserve,
            _ => return None,
        };
        let (all, own) = taken.counts(kind, address);
        *all += 1;
        *own += 1;
        taken.show();
        Some(ConnectionSlot { kind, address, taken: self.taken.clone() })
    }
}

impl Taken {
    fn show(&self) {
        HTTP_CONNECTIONS.set(&(), self.usual + self.reserve);
    }

    /// The counters of `kind`: over all addresses, and of `address`.
    fn counts(&mut self, kind: Kind, address: IpAddr) -> (&mut usize, &mut usize) {
        let own = self.addresses.entry(address).or_default();
        match kind {
            Kind::Usual => (&mut self.usual, &mut own.0),
            Kind::Reserve => (&mut self.reserve, &mut own.1),
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, own) = taken.counts(self.kind, self.address);
        *all -= 1;
        *own -= 1;
        taken.show();
        if taken.addresses.get(&self.address) == Some(&(0, 0)) {
            taken.addresses.remove(&self.address);
        }
    }
}

/// Key under which connections are counted: an IPv4 address, or the /64 network of an IPv6 address,
/// the smallest network that a site gets.
fn counted_by(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() & (u128::MAX << 64)).into()),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(connections: usize, connections_per_address: usize) -> ConnectionSlots {
        ConnectionSlots::new(&ServeOptions { connections, connections_per_address, ..ServeOptions::default() })
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn one_address_gets_its_connection_share_and_few_reserve_slots() {
        let (places, greedy) = (places(10, 4), address("192.0.2.1"));
        let taken: Vec<_> = std::iter::from_fn(|| places.take(greedy, Kind::Usual)).collect();
        let usual = taken.iter().filter(|place| place.kind == Kind::Usual).count();
        assert_eq!((usual, taken.len()), (4, 4 + RESERVE_PER_ADDRESS));
        for other in ["192.0.2.2", "2001:db8::1"] {
            assert_eq!(places.take(address(other), Kind::Usual).map(|place| place.kind), Some(Kind::Usual));
            assert_eq!(places.take(address(other), Kind::Reserve).map(|place| place.kind), Some(Kind::Reserve));
        }
        drop(taken);
        assert_eq!(places.take(greedy, Kind::Usual).map(|place| place.kind), Some(Kind::Usual));
        assert!(
            places.taken.lock().expect("not poisoned").addresses.is_empty(),
            "the counts of all addresses are removed"
        );
    }

    #[test]
    fn a_full_server_uses_its_reserve_per_ipv6_network() {
        let places = places(2, 1);
        let _taken = ["2001:db8::1", "::ffff:192.0.2.1"].map(|of| places.take(address(of), Kind::Usual).expect("free"));
        for late in ["2001:db8::2", "192.0.2.1", "192.0.2.9"] {
            assert_eq!(places.take(address(late), Kind::Usual).map(|place| place.kind), Some(Kind::Reserve), "{late}");
        }
    }
}
