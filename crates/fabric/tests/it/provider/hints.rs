//! Which hints the provider offers an info for, and which it rejects.

use std::ffi::{CStr, CString};

use memferry_fi::abi::*;

use crate::provider::world::*;

/// The offer for hints that request only this.
fn with_hints(change: impl FnOnce(&mut Parts<'_>)) -> Result<Offer, i32> {
    Offer::for_hints(Some(&Offer::nothing().with(change)))
}

#[test]
fn without_hints_there_is_one_offer_of_everything() {
    let offer = Offer::for_hints(None).unwrap();
    offer.see(|parts| {
        assert!(parts.info.next.is_null() && parts.fabric.prov_name.is_null());
        // SAFETY: an offer has a name of the fabric.
        let name = unsafe { CStr::from_ptr(parts.fabric.name) };
        assert_eq!(name, c"memferry");
        let wanted = FI_MSG | FI_TAGGED | FI_DIRECTED_RECV | FI_MULTI_RECV | FI_SOURCE;
        assert_eq!(parts.info.caps & wanted, wanted);
        assert_eq!((parts.ep.r#type, parts.info.src_addrlen), (FI_EP_RDM, 64));
        assert!(parts.tx.iov_limit >= 4 && parts.domain.cq_data_size == 8);
    });
}

#[test]
fn what_open_mpi_asks_for_is_offered() {
    let offer = with_hints(|parts| {
        parts.info.mode = FI_CONTEXT | FI_CONTEXT2;
        parts.info.caps = FI_TAGGED | FI_LOCAL_COMM | FI_REMOTE_COMM | FI_DIRECTED_RECV;
        parts.ep.r#type = FI_EP_RDM;
        (parts.tx.msg_order, parts.rx.msg_order) = (FI_ORDER_SAS, FI_ORDER_SAS);
        (parts.tx.op_flags, parts.rx.op_flags) = (FI_COMPLETION, FI_COMPLETION);
        parts.domain.threading = FI_THREAD_DOMAIN;
        parts.domain.cq_data_size = 4;
        parts.domain.av_type = FI_AV_MAP;
        parts.domain.resource_mgmt = FI_RM_ENABLED;
    })
    .unwrap();
    offer.see(|parts| {
        assert_eq!(parts.info.caps & FI_MSG, 0, "it was not asked for");
        assert_eq!(parts.domain.threading, FI_THREAD_DOMAIN);
        assert_eq!((parts.domain.av_type, parts.domain.mr_mode), (FI_AV_MAP, 0));
        assert_eq!((parts.tx.op_flags, parts.rx.op_flags), (FI_COMPLETION, FI_COMPLETION));
        assert_eq!(parts.tx.msg_order & FI_ORDER_SAS, FI_ORDER_SAS);
    });
}

#[test]
fn threading_progress_and_vectors_are_as_asked() {
    for number in 1..=2 {
        let offer = with_hints(|parts| {
            (parts.domain.threading, parts.domain.av_type) = (number, number);
            (parts.domain.control_progress, parts.domain.data_progress) = (number, number);
        });
        offer.unwrap().see(|parts| {
            assert_eq!((parts.domain.threading, parts.domain.av_type), (number, number));
            assert_eq!(parts.domain.control_progress, number);
            assert_eq!(parts.domain.data_progress, number);
        });
    }
}

#[test]
fn what_is_not_there_is_not_offered() {
    type Change = fn(&mut Parts<'_>);
    let changes: [(&str, Change); 20] = [
        ("groups", |parts| parts.info.caps = FI_MSG | FI_MULTICAST),
        ("events of accesses", |parts| parts.info.caps = FI_RMA | FI_RMA_EVENT),
        ("memory of devices", |parts| parts.info.caps = FI_MSG | FI_HMEM),
        ("connections", |parts| parts.ep.r#type = FI_EP_MSG),
        ("datagrams", |parts| parts.ep.r#type = FI_EP_DGRAM),
        ("a protocol", |parts| parts.ep.protocol = FI_PROTO_SHM),
        ("several contexts", |parts| parts.ep.tx_ctx_cnt = 2),
        ("addresses of sockets", |parts| parts.info.addr_format = FI_SOCKADDR_IN),
        ("another fabric", |parts| parts.fabric.name = c"elsewhere".as_ptr().cast_mut()),
        ("another domain", |parts| parts.domain.name = c"elsewhere".as_ptr().cast_mut()),
        ("another provider", |parts| parts.fabric.prov_name = c"tcp".as_ptr().cast_mut()),
        ("a layer", |parts| parts.fabric.prov_name = c"memferry;ofi_rxm".as_ptr().cast_mut()),
        ("accesses after sends", |parts| parts.tx.msg_order = FI_ORDER_WAS),
        ("reads after sends", |parts| parts.rx.msg_order = FI_ORDER_RAS),
        ("the strictest order", |parts| parts.tx.msg_order = FI_ORDER_STRICT),
        ("completions in order", |parts| parts.tx.comp_order = FI_ORDER_STRICT),
        ("bytes in order", |parts| parts.rx.comp_order = FI_ORDER_DATA),
        ("longer injections", |parts| parts.tx.inject_size = 1 << 20),
        ("more data", |parts| parts.domain.cq_data_size = 16),
        ("shared contexts", |parts| parts.ep.rx_ctx_cnt = usize::MAX),
    ];
    for (what, change) in changes {
        assert_eq!(with_hints(change).err(), Some(-FI_ENODATA), "{what}");
    }
    with_hints(|parts| parts.fabric.prov_name = c"memferry".as_ptr().cast_mut()).unwrap();
    for flag in [58, 59, 61] {
        let layered = Offer::find(None, None, 1 << flag);
        assert_eq!(layered.err(), Some(-FI_ENODATA), "flag {flag} of layered providers");
    }
}

#[test]
fn orders_and_levels_of_completion_are_as_asked() {
    let natural = FI_ORDER_SAS
        | FI_ORDER_RMA_RAW
        | FI_ORDER_RMA_WAW
        | FI_ORDER_ATOMIC_RAW
        | FI_ORDER_ATOMIC_WAW;
    let asked = [FI_ORDER_RAW | FI_ORDER_WAW, FI_ORDER_SAW | FI_ORDER_SAR, FI_ORDER_ATOMIC_RAR];
    for order in asked {
        let offer = with_hints(|parts| (parts.tx.msg_order, parts.rx.msg_order) = (order, order));
        offer.unwrap().see(|parts| {
            for given in [parts.tx.msg_order, parts.rx.msg_order] {
                assert_eq!(given & (natural | order), natural | order);
            }
        });
    }
    let offer = with_hints(|parts| parts.info.caps = FI_MSG).unwrap();
    offer.see(|parts| {
        assert_eq!(parts.tx.msg_order & (FI_ORDER_RAW | FI_ORDER_SAW), 0, "not asked for");
        assert_eq!(parts.ep.max_order_raw_size, 0, "there are no accesses");
    });
    let levels =
        [FI_INJECT_COMPLETE, FI_TRANSMIT_COMPLETE, FI_DELIVERY_COMPLETE, FI_MATCH_COMPLETE];
    for level in levels {
        let offer = with_hints(|parts| parts.tx.op_flags = level).unwrap();
        offer.see(|parts| assert_eq!(parts.tx.op_flags, level));
    }
    let durable = with_hints(|parts| parts.tx.op_flags = FI_COMMIT_COMPLETE);
    assert_eq!(durable.err(), Some(-FI_ENODATA));
}

#[test]
fn a_service_has_one_address_on_both_sides() {
    let address = |offer: &Offer, of_source: bool| {
        offer.see(|parts| {
            let info = &parts.info;
            let (at, length) = match of_source {
                true => (info.src_addr, info.src_addrlen),
                false => (info.dest_addr, info.dest_addrlen),
            };
            assert_eq!(length, 64);
            // SAFETY: the address is as long as the info states.
            unsafe { *at.cast::<Name>() }
        })
    };
    // A service that no concurrent run of this test uses: addresses are unique on the whole host.
    let service = CString::new(std::process::id().to_string()).unwrap();
    let here = Offer::find(None, Some(&service), FI_SOURCE).unwrap();
    let there = Offer::find(None, Some(&service), 0).unwrap();
    assert_eq!(address(&here, true), address(&there, false));
    assert_ne!(address(&there, true), address(&there, false));
    // A server, and a client that knows only the service.
    let (server, client) = (World::of(here), World::of(there));
    let (two, one) = (server.side(), client.side());
    assert_eq!(one.insert(&address(&client.offer, false)), 0);
    let mut buffer = [0; 6];
    assert_eq!((two.trecv(&mut buffer, 1, 0, 1), one.tsend(b"knock!", 0, 1, 1)), (0, 0));
    let (entry, source) = two.read_from();
    assert_eq!((entry.len, source, &buffer), (6, FI_ADDR_NOTAVAIL, b"knock!"));
    one.read();
}
