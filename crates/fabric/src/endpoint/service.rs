//! Requests between the providers of two processes. They travel as messages that match no receive
//! ([`MatchSpace::Service`]): atomic operations that the owner of the memory executes, notifications
//! of writes with completion data, and the return of credit for these.
//!
//! A target queues an entry for every notification, so an initiator has a limited credit of them,
//! which the target returns while the program reads its queue.

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memferry_message::{Envelope, MatchSpace, Peer, ServiceMessage};

use super::core::EndpointCore;
use crate::abi::*;
use crate::guard::{FiError, Result};
use crate::mr_table::MrTable;
use crate::queue::QueuedCompletion;

/// The kinds of requests, in the lowest byte of the tag.
pub(super) const ATOMIC: u8 = 1;
const WRITTEN: u8 = 2;
const CREDIT: u8 = 3;

/// The maximum number of notifications to one peer for which it has not returned the credit.
const MAX_NOTIFICATIONS: usize = 256;
/// The number of notifications for which credit is returned at once.
const CREDIT_BATCH: usize = 64;
/// No credit is returned while a program leaves this number of entries in its queue.
const MAX_UNREAD_ENTRIES: usize = 4096;
/// The maximum number of requests that one call executes. The next call continues.
const SERVICE_BATCH: usize = 256;
/// The maximum number of peers on other hosts whose handles are kept.
const MAX_PINNED: usize = 4096;
/// From this number of peers on, disconnected ones are removed.
const PEER_SWEEP_THRESHOLD: usize = 64;

/// The notification of a peer after a write.
#[derive(Debug, Clone, Copy)]
pub(super) struct WriteNotification {
    pub(super) peer: Peer,
    /// The number of the connection in which the write was started.
    pub(super) connection: u64,
    pub(super) data: u64,
    /// The number of bytes written.
    pub(super) length: u64,
}

/// The state of requests of one endpoint.
#[derive(Debug)]
pub(super) struct ServiceState {
    /// The memory that peers may access.
    pub(super) mr_table: Arc<MrTable>,
    /// The number of atomic operations without a reply.
    pub(super) atomics_in_flight: AtomicUsize,
    /// The number of replies that have not left.
    pub(super) replies_in_flight: AtomicUsize,
    /// The next ticket of an atomic operation. The first one is random: a reply to an endpoint that
    /// had the same address before matches nothing.
    pub(super) tickets: AtomicU64,
    notifications: Mutex<HashMap<Peer, NotificationCredit>>,
    /// Credit is due for notifications of peers.
    owes_credit: AtomicBool,
    /// The peers on other hosts that have sent requests.
    pinned: Mutex<HashSet<Peer>>,
}

/// The credit of one connection.
#[derive(Debug, Clone, Copy, Default)]
struct NotificationCredit {
    connection: u64,
    /// Notifications to the peer without credit.
    sent: usize,
    /// Notifications of the peer for which no credit was returned.
    received: usize,
}

impl NotificationCredit {
    /// Starts again if the peer has connected again.
    fn renew(&mut self, connection: u64) {
        if self.connection < connection {
            *self = Self { connection, ..Self::default() };
        }
    }
}

impl ServiceState {
    pub(super) fn new(mr_table: Arc<MrTable>) -> Self {
        Self {
            mr_table,
            atomics_in_flight: AtomicUsize::new(0),
            replies_in_flight: AtomicUsize::new(0),
            tickets: AtomicU64::new(RandomState::new().build_hasher().finish()),
            notifications: Mutex::default(),
            owes_credit: AtomicBool::new(false),
            pinned: Mutex::default(),
        }
    }
}

/// The envelope of a request.
pub(super) fn request(kind: u8, detail: u64, data: Option<u64>) -> Envelope {
    Envelope { space: MatchSpace::Service, tag: u64::from(kind) | detail << 8, data }
}

impl EndpointCore {
    /// Executes requests of peers that have arrived. If there are more, the next call continues:
    /// peers that send without an end must not keep this one from its program.
    #[cold]
    pub(super) fn serve(&self) {
        for message in self.messages.take_services(SERVICE_BATCH) {
            let ServiceMessage { peer, connection, .. } = message;
            self.pin_remote(peer);
            let detail = message.envelope.tag >> 8;
            match message.envelope.tag as u8 {
                // Ended with the reply.
                ATOMIC => {
                    self.serve_atomic(&message);
                    continue;
                }
                WRITTEN => self.on_written(&message),
                CREDIT => {
                    let count = usize::try_from(detail).unwrap_or(usize::MAX);
                    self.give_back_notification_credit(peer, connection, count);
                }
                kind => tracing::debug!(kind, "dropping a request of an unknown kind"),
            }
            self.messages.end_service(peer, connection);
        }
        self.return_owed_credits();
    }

    /// As [`EndpointCore::progress`], for calls of a program that may only retry: all that this
    /// side must do for its peers is done. The order of completions is kept.
    pub(super) fn progress_for_retry(&self) {
        match &self.sends.queue {
            Some(queue) if self.has_single_queue() => queue.make_progress(),
            _ => self.progress(),
        }
    }

    /// Notes that the reply to a request has left, or never will.
    pub(super) fn on_reply_sent(&self, peer: Peer, connection: u64) {
        self.service.replies_in_flight.fetch_sub(1, Ordering::AcqRel);
        self.messages.end_service(peer, connection);
    }

    /// Makes progress until all replies have left: the operations are executed.
    pub(super) fn flush_replies(&self, timeout: Duration) {
        let began = Instant::now();
        while self.service.replies_in_flight.load(Ordering::Acquire) > 0
            && began.elapsed() < timeout
        {
            self.progress_for_retry();
            std::thread::yield_now();
        }
    }

    /// Keeps the handle of a peer on another host, as if the program had inserted its address:
    /// replies and credit are sent to it later.
    fn pin_remote(&self, peer: Peer) {
        if !self.has_remotes() {
            return;
        }
        let mut pinned = self.service.pinned.lock().unwrap();
        if pinned.contains(&peer) {
            return;
        }
        if pinned.len() >= PEER_SWEEP_THRESHOLD && pinned.len().is_power_of_two() {
            pinned.retain(|known| {
                let is_reachable = self.messages.is_reachable(*known);
                if !is_reachable {
                    self.messages.remove_peer(*known);
                }
                is_reachable
            });
        }
        if pinned.len() < MAX_PINNED
            && let Some(number) = self.messages.remote_id(peer)
            && let Ok(found) = self.messages.remote_peer(number)
        {
            match found == peer {
                true => drop(pinned.insert(peer)),
                false => self.messages.remove_peer(found),
            }
        }
    }

    /// Takes credit for a notification. Fails with `FI_EAGAIN` if none is left.
    pub(super) fn take_notification_credit(&self, notification: &WriteNotification) -> Result {
        let mut all = self.service.notifications.lock().unwrap();
        self.sweep(&mut all, notification.peer);
        let credit = all.entry(notification.peer).or_default();
        credit.renew(notification.connection);
        if credit.sent < MAX_NOTIFICATIONS {
            credit.sent += 1;
            return Ok(());
        }
        drop(all);
        self.progress_for_retry();
        Err(FiError(FI_EAGAIN))
    }

    /// Removes disconnected peers at intervals, when a new one is about to be added.
    fn sweep(&self, all: &mut HashMap<Peer, NotificationCredit>, next: Peer) {
        if all.len() >= PEER_SWEEP_THRESHOLD
            && all.len().is_power_of_two()
            && !all.contains_key(&next)
        {
            all.retain(|peer, _| self.identifier_of(*peer).is_some());
        }
    }

    /// Gives back credit of a connection. That of an earlier one is gone.
    pub(super) fn give_back_notification_credit(&self, peer: Peer, connection: u64, count: usize) {
        let mut all = self.service.notifications.lock().unwrap();
        if let Some(credit) = all.get_mut(&peer).filter(|credit| credit.connection == connection) {
            credit.sent = credit.sent.saturating_sub(count);
        }
    }

    /// Notifies the target of a write that has completed with this code, if it was successful.
    /// Returns the code of the whole operation.
    pub(super) fn finish_notified(&self, notification: &WriteNotification, code: c_int) -> c_int {
        let WriteNotification { peer, connection, data, length } = *notification;
        let code = match code {
            // The memory belonged to an endpoint that is gone.
            0 if self.messages.connection_number(peer) != Ok(connection) => FI_ECONNRESET,
            0 => {
                let written = request(WRITTEN, 0, Some(data));
                match self.messages.inject(peer, written, &length.to_le_bytes()) {
                    Ok(()) => return 0,
                    // The write was done, so it is not to be retried.
                    Err(error) => match FiError::from(error).0 {
                        FI_EAGAIN => FI_ENOMEM,
                        code => code,
                    },
                }
            }
            code => code,
        };
        self.give_back_notification_credit(peer, connection, 1);
        code
    }

    /// Queues the entry for a write of a peer.
    fn on_written(&self, message: &ServiceMessage) {
        let length = message.bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let (Some(data), Some(length)) = (message.envelope.data, length) else {
            return tracing::debug!("dropping an invalid notification");
        };
        {
            let mut all = self.service.notifications.lock().unwrap();
            self.sweep(&mut all, message.peer);
            let credit = all.entry(message.peer).or_default();
            credit.renew(message.connection);
            // A sender that is gone, and has connected again, gets no credit for what it sent before.
            if credit.connection == message.connection {
                if credit.received >= MAX_NOTIFICATIONS {
                    return tracing::warn!("dropping a notification beyond its sender's credit");
                }
                credit.received += 1;
            }
            if credit.received >= CREDIT_BATCH {
                self.service.owes_credit.store(true, Ordering::Relaxed);
            }
        }
        let flags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
        self.receives.deliver(QueuedCompletion {
            data,
            length: usize::try_from(length).unwrap_or(usize::MAX),
            source: self.number_of(message.peer).unwrap_or(FI_ADDR_NOTAVAIL),
            ..QueuedCompletion::new(0, flags)
        });
    }

    /// Returns the credit that is due, unless the program leaves its queue full.
    #[inline]
    pub(crate) fn return_owed_credits(&self) {
        if self.service.owes_credit.load(Ordering::Relaxed) {
            self.return_credits();
        }
    }

    #[cold]
    fn return_credits(&self) {
        let unread = self.receives.queue.as_ref().map_or(0, |queue| queue.len());
        if unread >= MAX_UNREAD_ENTRIES {
            return;
        }
        let mut due = Vec::new();
        {
            let mut all = self.service.notifications.lock().unwrap();
            self.service.owes_credit.store(false, Ordering::Relaxed);
            let is_due = |credit: &NotificationCredit| credit.received >= CREDIT_BATCH;
            for (peer, credit) in all.iter_mut().filter(|(_, credit)| is_due(credit)) {
                due.push((*peer, credit.connection, std::mem::take(&mut credit.received)));
            }
        }
        for (peer, connection, count) in due {
            // A peer that is gone needs no credit, nor does one that has connected again.
            if self.messages.connection_number(peer) != Ok(connection) {
                continue;
            }
            let _ = self.messages.inject(peer, request(CREDIT, count as u64, None), &[]);
        }
    }
}
