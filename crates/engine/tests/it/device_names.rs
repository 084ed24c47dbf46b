//! The names by which engines show their devices.

use std::sync::Arc;

use memferry_engine::Engine;
use memferry_engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
use memferry_engine::cuda::{CudaEngine, CudaProfile};
use memferry_engine::dsa::DsaEngine;
use memferry_engine::ioat::IoatEngine;
use memferry_engine::nic::{NicConfig, NicEngine};
use memferry_engine::testing::cuda_model::CudaModel;
use memferry_engine::testing::dsa_model::{DsaModel, IdxdModel, IdxdModelOptions};
use memferry_engine::testing::fault::{FaultEngine, FaultScript};
use memferry_engine::testing::ioat_model::IoatModel;
use memferry_engine::testing::nic_model::NicModel;
use memferry_memory::pin_cache::PinCacheLimits;

#[test]
fn an_engine_without_devices_names_none() {
    let profile = CpuProfile::load(&ProfileSource::BuiltIn).unwrap();
    assert!(CpuEngine::new(profile).devices().is_empty());
}

#[test]
fn a_device_with_many_queues_is_named_once() {
    let model = IoatModel::builder().name("0000:00:04.0").channels(4).build();
    let engine = IoatEngine::over_model(model).unwrap();
    assert_eq!((engine.channels(), engine.devices()), (4, vec!["0000:00:04.0".to_owned()]));
    let engine = DsaEngine::over_model(DsaModel::new()).unwrap();
    assert!(engine.channels() > 1);
    assert_eq!(engine.devices(), ["a model of a DSA device"]);
}

#[test]
fn each_work_queue_of_the_kernel_is_named() {
    let device = DsaModel::builder().queues(2);
    let model = IdxdModel::new(IdxdModelOptions { device, ..Default::default() }).unwrap();
    let engine = DsaEngine::over_idxd_model(model).unwrap();
    let names = ["wq0.0 of a model of a DSA device", "wq0.1 of a model of a DSA device"];
    assert_eq!(engine.devices(), names);
}

#[test]
fn models_say_that_they_are_models() {
    let limits = PinCacheLimits { max_bytes: 64 << 20, max_entries: 64 };
    let gpu = CudaEngine::with_driver(CudaModel::new(), CudaProfile::default(), limits).unwrap();
    assert_eq!(gpu.devices(), ["GPU 0 (a model of a GPU)"]);
    let card = NicEngine::over_model(NicModel::new(), NicConfig::default()).unwrap();
    assert_eq!(card.devices(), ["a model of a network card"]);
    let copies = Arc::new(IoatEngine::over_model(IoatModel::new()).unwrap());
    let faulty = FaultEngine::new(copies, FaultScript::default());
    assert_eq!(faulty.devices(), ["a model of an I/OAT device"]);
}
