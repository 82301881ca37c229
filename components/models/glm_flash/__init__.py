"""GLM-5.3-Flash's text model: KDA and sparse attention, hyper-connections, mixture of experts."""
