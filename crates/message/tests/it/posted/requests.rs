//! Requests to the layer above, of peers that come and go.

use super::*;
use memferry_message::{Peer, ServiceMessage};

const REQUEST: Envelope = Envelope { space: MatchSpace::Service, tag: 1, data: None };
/// More than half of what one peer may have in flight.
const MANY: usize = 1500;

/// Connects an endpoint to a server, sends requests, and waits until the server has them.
fn send_requests(server: &Endpoint, client: &Endpoint, count: usize) {
    let to_server = client.add_peer(server.name()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(200);
    while !client.is_connected(to_server).unwrap() {
        assert!(Instant::now() < deadline, "the connection is accepted");
        server.progress();
        client.progress();
    }
    for index in 0..count {
        client.inject(to_server, REQUEST, &[0; 24]).unwrap();
        if index % 64 == 0 {
            server.progress();
        }
    }
    while !client.flush(Duration::from_millis(1)) {
        assert!(Instant::now() < deadline, "the requests leave");
        server.progress();
    }
    server.progress();
}

/// Waits until no peer is connected.
fn await_ends(server: &Endpoint) {
    let deadline = Instant::now() + Duration::from_secs(200);
    while !server.peers().is_empty() {
        assert!(Instant::now() < deadline, "the end is noticed");
        server.progress();
    }
}

/// Takes requests when an entry reports them, and only then.
fn take_reported(server: &Endpoint, limit: usize, count: usize) -> Vec<ServiceMessage> {
    let mut taken = Vec::new();
    while taken.len() < count {
        let reports = completions(&[server], 0, 1);
        assert!(reports.iter().all(|report| report.kind == CompletionKind::Service));
        assert_eq!(reports.len(), 1);
        let batch = server.take_services(limit);
        assert!(!batch.is_empty() && batch.len() <= limit);
        taken.extend(batch);
    }
    taken
}

#[test]
fn requests_that_were_not_taken_are_reported_again() {
    let (server, _) = endpoint("batches");
    server.enable_service();
    let (client, _) = endpoint("batches-client");
    send_requests(&server, &client, 100);
    assert_eq!(take_reported(&server, 7, 100).len(), 100);
    assert!(server.take_services(7).is_empty());
}

#[test]
fn requests_of_peers_that_are_gone_do_not_count_for_the_next_ones() {
    let (server, _) = endpoint("crowd");
    server.enable_service();
    for index in 0..4 {
        let (client, _) = endpoint(&format!("crowd-client-{index}"));
        send_requests(&server, &client, MANY);
        drop(client);
        await_ends(&server);
    }
    assert_eq!(take_reported(&server, MANY, 4 * MANY).len(), 4 * MANY);
}

#[test]
fn a_peer_that_connects_again_has_another_connection_with_the_same_handle() {
    let (server, _) = endpoint("again");
    server.enable_service();
    let (client, name) = endpoint("again-client");
    let peer: Peer = server.add_peer(&name).unwrap();
    let first = server.connection_number(peer).unwrap();
    send_requests(&server, &client, MANY);
    drop(client);
    await_ends(&server);
    let (client, _) = endpoint("again-client");
    send_requests(&server, &client, MANY);
    let second = server.connection_number(peer).unwrap();
    assert_ne!(first, second);
    let taken = take_reported(&server, 256, 2 * MANY);
    for (index, request) in taken.iter().enumerate() {
        let connection = if index < MANY { first } else { second };
        assert_eq!((request.peer, request.connection), (peer, connection), "request {index}");
        server.end_service(request.peer, request.connection);
    }
    // There is room for as many again.
    send_requests(&server, &client, MANY);
    assert_eq!(take_reported(&server, MANY, MANY).len(), MANY);
}
