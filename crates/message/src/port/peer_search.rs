//! Finding peers by name, by identity and by listener.

use super::Peer;
use super::peer_table::{PeerSlot, PeerTable};
use crate::connect::{EndpointId, ListenerAddress};
use crate::connection::{Connection, PeerInfo};
use crate::error::Error;

impl PeerTable {
    /// All connected peers.
    pub(crate) fn all_peers(&self) -> Vec<Peer> {
        let connected = |index: &usize| self.slots[*index].connection.is_some();
        (0..self.slots.len()).filter(connected).map(|index| self.peer(index)).collect()
    }

    /// Whether a peer is connected, or was before it disconnected.
    pub(crate) fn was_connected(&self, peer: Peer) -> bool {
        self.index_of(peer).is_ok_and(|index| {
            let slot = &self.slots[index];
            slot.connection.is_some() || slot.last_peer.is_some()
        })
    }

    /// The connection of a peer.
    pub(crate) fn connection_of(&self, peer: Peer) -> Result<&Connection, Error> {
        let index = self.index_of(peer)?;
        let connection = self.slots[index].connection.as_ref();
        connection.map(|connection| &connection.wire).ok_or_else(|| self.disconnect_error(index))
    }

    /// The name of a peer, which may be disconnected.
    pub(crate) fn name_of(&self, peer: Peer) -> Result<String, Error> {
        let index = self.index_of(peer)?;
        let slot = &self.slots[index];
        let now = slot.connection.as_ref().map(|connection| &connection.wire.peer.name);
        let ever = slot.added_name().or(slot.last_peer.as_ref().map(|(_, name)| name));
        now.or(ever).cloned().ok_or_else(|| self.disconnect_error(index))
    }

    /// The first connected peer that `is_it` accepts.
    pub(super) fn find_peer(&self, is_it: impl Fn(&PeerInfo) -> bool) -> Option<Peer> {
        let index = self.slots.iter().position(|slot| {
            slot.connection.as_ref().is_some_and(|connection| is_it(&connection.wire.peer))
        })?;
        Some(self.peer(index))
    }

    /// The connection of this endpoint to itself.
    pub(super) fn find_self(&self) -> Option<Peer> {
        let is_self = |slot: &PeerSlot| slot.connection.as_ref().is_some_and(|c| c.wire.is_self());
        self.slots.iter().position(is_self).map(|index| self.peer(index))
    }

    /// The connected peer with this identity.
    pub(super) fn find_id(&self, id: EndpointId) -> Option<Peer> {
        self.find_peer(|info| info.id == id)
    }

    /// The connected peer that listens on a name according to the kernel.
    pub(super) fn find_verified(&self, name: &str) -> Option<Peer> {
        self.find_peer(|info| info.is_name_verified && info.name == name)
    }

    /// The connected peer of a name: this side connected to the name, or the peer claims to listen there.
    pub(crate) fn find_name(&self, name: &str) -> Option<Peer> {
        self.find_peer(|info| !info.name.is_empty() && info.name == name)
    }

    /// The peer of a name, which may be disconnected.
    pub(crate) fn find_name_or_last(&self, name: &str) -> Option<Peer> {
        self.find_name(name).or_else(|| self.find_disconnected(|_, last| last == name))
    }

    /// The peer with this identity, which may be disconnected.
    pub(super) fn find_id_or_last(&self, id: EndpointId) -> Option<Peer> {
        self.find_id(id).or_else(|| self.find_disconnected(|last, _| last == id))
    }

    /// The peer of a name that this side could not connect to: the peer has connected to this side since
    /// `before`, or is disconnected and has messages left to receive.
    pub(super) fn find_incoming(
        &self,
        name: &str,
        listening: Option<&ListenerAddress>,
        before: Option<Peer>,
    ) -> Option<Peer> {
        let is_it = |id: EndpointId, last: &str| {
            listening.is_some_and(|listening| listening.matches(last, id.credentials))
        };
        let found = self.find_name_or_last(name).or_else(|| self.find_disconnected(is_it));
        found.filter(|peer| Some(*peer) != before || self.slots[peer.index].unexpected_count > 0)
    }

    /// The first disconnected peer that `is_it` accepts.
    fn find_disconnected(&self, is_it: impl Fn(EndpointId, &str) -> bool) -> Option<Peer> {
        let matches = |slot: &PeerSlot| {
            let last = slot.last_peer.as_ref().filter(|_| slot.connection.is_none());
            last.is_some_and(|(id, name)| is_it(*id, name))
        };
        self.slots.iter().position(matches).map(|index| self.peer(index))
    }

    /// Ends a connect of this side to a listener.
    pub(super) fn stop_connecting(&mut self, listening: &ListenerAddress) {
        if let Some(index) = self.connecting_to.iter().position(|dialed| dialed == listening) {
            self.connecting_to.swap_remove(index);
        }
    }
}
